// "Look further back" on a block's page: the older steps are put below those that are shown. Without this script the link
// goes to them.
"use strict";
(() => {
  const steps = document.getElementById("steps");
  const further = document.getElementById("further");

  further.addEventListener("click", async (event) => {
    const link = event.target.closest("#look-back");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (further.getAttribute("aria-busy") === "true") return;
    further.setAttribute("aria-busy", "true");
    const label = link.textContent;
    link.textContent = "Looking…";
    try {
      const answer = await fetch(link.href, { headers: { Accept: "text/html" } });
      if (answer.status === 401 || answer.redirected) return location.reload();
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const older = [...page.querySelectorAll("#steps > li")];
      steps.append(...older);
      page.querySelector("#further [rel=first]")?.remove();
      further.replaceChildren(...page.getElementById("further").childNodes);
      // Whoever works by keyboard goes on where the older steps begin, or where the button was.
      const next = older[0] ?? document.getElementById("look-back");
      if (older[0]) next.tabIndex = -1;
      next?.focus({ preventScroll: true });
    } catch (error) {
      link.textContent = label;
      window.actions.say(`Look further back: ${error.message}. What is shown stays; press again.`, "bad");
    } finally {
      further.removeAttribute("aria-busy");
    }
  });
})();
