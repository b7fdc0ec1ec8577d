// Says when the page no longer shows the present. The stream itself, and reopening one that ended, are htmx's.
"use strict";
(() => {
  const SILENCE_MS = 4000;
  const OPEN_AGAIN_MS = 5000;
  const stream = document.getElementById("live");
  const banner = document.getElementById("lost");
  const since = document.getElementById("lost-since");
  const offline = document.getElementById("offline");
  let heardMs = Date.now();
  let openedMs = Date.now();

  document.getElementById("lost-where").textContent = location.origin;

  function heard() {
    heardMs = Date.now();
    show(false);
  }

  function show(lost) {
    if (banner.hidden !== lost) return;
    banner.hidden = offline.hidden = !lost;
    document.body.classList.toggle("stale", lost);
    if (!lost) return;
    const time = new Date(heardMs).toISOString();
    since.dateTime = time;
    since.textContent = `${time.slice(0, 10)} ${time.slice(11, 19)} UTC`;
  }

  document.addEventListener("htmx:sse:before:message", heard);
  document.addEventListener("htmx:sse:error", () => show(true));
  // htmx closes the stream of a page in the background and opens it again: that silence is nobody's fault.
  document.addEventListener("visibilitychange", () => { heardMs = Date.now(); });
  setInterval(() => {
    if (document.hidden || Date.now() - heardMs < SILENCE_MS) return;
    show(true);
    // htmx reopens a stream that it once had, never one whose first request failed; with one at hand this does nothing.
    if (Date.now() - openedMs < OPEN_AGAIN_MS) return;
    openedMs = Date.now();
    htmx.trigger(stream, "open-again");
  }, 1000);
})();
