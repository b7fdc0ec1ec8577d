// The prefix explorer: links of the tree change the part in place, and arrows move between its boxes, of which one at a
// time is reached by Tab.
"use strict";
(() => {
  const explorer = () => document.getElementById("explorer");
  const boxes = () => [...explorer().querySelectorAll("a.box")];

  function rove(chosen) {
    for (const box of boxes()) box.setAttribute("tabindex", box === chosen ? "0" : "-1");
  }

  async function show() {
    await window.refresh("#explorer");
    document.getElementById("walked").textContent = document.getElementById("here").textContent;
  }

  async function walk(href) {
    history.pushState(null, "", href);
    await show();
    const [first] = boxes();
    rove(first);
    (first ?? explorer().querySelector(".crumbs a:last-of-type"))?.focus();
  }

  // Nothing when there is no box that way.
  function towards(key, box) {
    const all = boxes();
    const row = all.filter((other) => other.dataset.row === box.dataset.row);
    const at = row.indexOf(box);
    switch (key) {
      case "ArrowLeft": return row[at - 1];
      case "ArrowRight": return row[at + 1];
      case "Home": return row[0];
      case "End": return row.at(-1);
      case "ArrowDown": return all.find((other) => other.dataset.above === box.dataset.box);
      case "ArrowUp": return all.find((other) => other.dataset.box === box.dataset.above);
      default: return undefined;
    }
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("#explorer a[data-walk]");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    walk(link.getAttribute("href"));
  });

  document.addEventListener("keydown", (event) => {
    const box = event.target.closest("#explorer a.box");
    const up = [...document.querySelectorAll("#explorer .crumbs a")].at(-1);
    if (event.key === "Escape" && up && event.target.closest("#explorer")) return walk(up.getAttribute("href"));
    const next = box && towards(event.key, box);
    if (!next) return;
    event.preventDefault();
    rove(next);
    next.focus();
  });

  // What the server sends has every box in the order of Tab.
  document.addEventListener("refreshed", (event) => {
    if (event.target.id === "explorer") rove(boxes().find((box) => box === document.activeElement) ?? boxes()[0]);
  });
  window.addEventListener("popstate", show);
  rove(boxes()[0]);
})();
