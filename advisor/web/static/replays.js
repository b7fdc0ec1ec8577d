// The page of replays: what is chosen becomes the order that actions.js sends, and files are sent with their progress.
"use strict";
(() => {
  const run = document.getElementById("run");
  const upload = document.getElementById("upload");

  // -- the order

  // Fields without a name are what a person sees; each `data-list` field holds those that are `data-of` it, as JSON.
  function compose() {
    for (const list of run.querySelectorAll("[data-list]")) {
      const [first, ...others] = run.querySelectorAll(`[data-of="${list.name}"]`);
      list.disabled = list.closest("fieldset").disabled;
      list.value = JSON.stringify(first.type === "checkbox" ? ticked([first, ...others]) : numbers(first));
    }
  }

  function ticked(boxes) {
    const values = boxes.filter((box) => box.checked).map((box) => box.value);
    boxes[0].setCustomValidity(values.length || boxes[0].closest("fieldset").disabled ? "" : "Choose one at least.");
    return values;
  }

  function numbers(field) {
    const words = field.value.split(/[\s,;]+/).filter(Boolean);
    const values = words.map(Number);
    const isWhole = field.inputMode === "numeric";
    const isGood = values.every((value) => (isWhole ? Number.isInteger(value) && value > 0 : value >= 0));
    const isThere = words.length || "mayBeEmpty" in field.dataset || field.closest("fieldset").disabled;
    field.setCustomValidity(isGood && isThere ? "" : `Give ${isWhole ? "whole " : ""}numbers with spaces between, such as ${isWhole ? "1000 5000" : "0.1 0.5"}.`);
    return isGood ? values : [];
  }

  function showTiers() {
    const isTwo = run.querySelector("#tiers").value === "two";
    for (const [id, isShown] of [["one-tier", !isTwo], ["two-tiers", isTwo]]) {
      const fields = run.querySelector(`#${id}`);
      fields.hidden = fields.disabled = !isShown;
    }
    compose();
  }

  // Sizes come when the blocks are counted; what a person has typed stays.
  function suggest() {
    const sizes = document.getElementById("facts").dataset.capacities;
    for (const field of run.querySelectorAll("[data-suggested]")) {
      if (field.value === field.defaultValue) field.value = field.defaultValue = sizes;
    }
    compose();
  }

  if (run) {
    run.addEventListener("input", compose);
    run.querySelector("#tiers").addEventListener("change", showTiers);
    document.addEventListener("refreshed", (event) => { if (event.target.id === "facts") suggest(); });
    // The address names it before the page's parts are taken anew.
    run.addEventListener("answered", (event) => {
      const { id, order } = event.detail;
      history.replaceState(null, "", `/replay?recording=${encodeURIComponent(order.recording)}&replay=${id}`);
    });
    showTiers();
  }

  // -- a file

  // fetch() tells nothing of how much has been sent.
  function send(file, name, told) {
    return new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open("PUT", `/api/v1/recordings/${encodeURIComponent(name)}`);
      request.setRequestHeader("Content-Type", "application/octet-stream");
      request.upload.addEventListener("progress", (event) => told(event.loaded / file.size));
      request.addEventListener("load", () => resolve(request));
      request.addEventListener("error", () => reject(new Error("the connection ended: send it again")));
      request.send(file);
    });
  }

  const nameOf = (file) => file.name.toLowerCase().replace(/[^a-z0-9._-]+/g, "-").replace(/^[^a-z0-9]+/, "").slice(-64);

  async function take(file) {
    const name = nameOf(file) || "recording";
    if (file.size > Number(upload.dataset.bytesMax)) throw new Error(`${file.name} is too large: copy it into the folder recordings of the advisor's directory.`);
    const bar = upload.querySelector("progress");
    bar.hidden = false;
    window.actions.say(`${name}: being sent…`);
    const answer = await send(file, name, (share) => {
      bar.value = share;
      if (share === 1) window.actions.say(`${name}: sent, and being read…`);
    });
    if (answer.status === 401) return location.assign(`/login?next=${encodeURIComponent("/replay")}`);
    const isProblem = /json/.test(answer.getResponseHeader("Content-Type") ?? "");
    if (answer.status !== 200) throw new Error(isProblem ? JSON.parse(answer.responseText).detail : `The server answered ${answer.status}.`);
    return location.assign(`/replay?recording=${encodeURIComponent(name)}`);
  }

  upload?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const [file] = upload.querySelector("input").files;
    const button = upload.querySelector("button");
    button.disabled = true;
    try {
      await take(file);
    } catch (error) {
      window.actions.say(`Send: ${error.message}`, "bad");
    } finally {
      button.disabled = false;
      upload.querySelector("progress").hidden = true;
    }
  });
})();
