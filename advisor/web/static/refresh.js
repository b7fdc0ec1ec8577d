// Parts of a page that follow the service: every element with an id and data-every-s="2" is taken anew from this same page
// that often, all those due in one request. Nothing is asked while the tab is hidden. `refresh("#id")` does it at once.
//
// Forms and what a person has typed belong outside such a part; an open <details> with an id stays open.
"use strict";
(() => {
  const TICK_MS = 1000;
  const lost = document.getElementById("lost");
  const due = new WeakMap();
  let asking = false;
  let heardMs = Date.now();

  async function take(elements) {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (answer.status === 401 || answer.redirected) return location.reload();
    if (!answer.ok) throw new Error(String(answer.status));
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const element of elements) {
      const fresh = page.getElementById(element.id);
      if (!fresh || !element.isConnected) continue;
      for (const open of element.querySelectorAll("details[id][open]")) {
        fresh.querySelector(`#${CSS.escape(open.id)}`)?.setAttribute("open", "");
      }
      await htmx.swap({ text: fresh.outerHTML, target: element, sourceElement: element, swap: "outerMorph" });
      element.dispatchEvent(new CustomEvent("refreshed", { bubbles: true }));
    }
    heardMs = Date.now();
    show(false);
  }

  // Without a part, or with one that is not there, the whole page comes anew.
  window.refresh = async (selector) => {
    const element = selector && document.querySelector(selector);
    const followed = element ? [element, ...document.querySelectorAll("[data-every-s]")] : [];
    if (!element) return location.reload();
    try {
      await take([...new Set(followed)]);
    } catch {
      show(true);
    }
  };

  function show(isLost) {
    if (!lost || lost.hidden !== isLost) return;
    lost.hidden = !isLost;
    document.body.classList.toggle("stale", isLost);
    if (!isLost) return;
    const since = document.getElementById("lost-since");
    since.dateTime = new Date(heardMs).toISOString();
    since.textContent = `${since.dateTime.slice(0, 10)} ${since.dateTime.slice(11, 19)} UTC`;
    document.getElementById("lost-where").textContent = location.origin;
  }

  setInterval(async () => {
    if (document.hidden || asking) return;
    const nowMs = Date.now();
    const parts = [...document.querySelectorAll("[data-every-s][id]")].filter((element) => {
      const atMs = due.get(element);
      if (atMs === undefined || atMs <= nowMs) due.set(element, nowMs + element.dataset.everyS * 1000 - TICK_MS / 2);
      return atMs !== undefined && atMs <= nowMs;
    });
    if (!parts.length) return;
    asking = true;
    try {
      await take(parts);
    } catch {
      show(true);
    } finally {
      asking = false;
    }
  }, TICK_MS);
})();
