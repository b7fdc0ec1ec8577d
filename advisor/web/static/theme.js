// The chosen theme, set before the first paint so that a dark page never flashes white.
"use strict";
(() => {
  const choices = ["auto", "light", "dark"];
  const stored = localStorage.getItem("theme");
  let choice = choices.includes(stored) ? stored : "auto";

  function apply() {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
  }
  apply();

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.textContent = `Theme: ${choice}`;
    button.addEventListener("click", () => {
      choice = choices[(choices.indexOf(choice) + 1) % choices.length];
      if (choice === "auto") localStorage.removeItem("theme");
      else localStorage.setItem("theme", choice);
      apply();
      button.textContent = `Theme: ${choice}`;
      document.dispatchEvent(new Event("themechange"));
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.dispatchEvent(new Event("themechange"));
  });
})();
