// Whatever a person does on a page: asked about first, sent as JSON, its answer said where everybody hears it.
//
//   <button type="button" data-send="POST /api/v1/pause" data-body='{"volume": "nvme-a"}' data-confirm="What will happen.">
//   <form data-send="PATCH /api/v1/volumes/nvme-a" data-confirm="…"> its fields are the body; see `bodyOf`
//
// data-done: said when it is done. data-refresh="#id": that part is shown anew, else the page. data-then="/path": goes there.
"use strict";
(() => {
  const SAID = "said";
  const answer = document.getElementById("answer");
  const dialog = document.getElementById("confirm");
  const underWay = new Set();
  // Of requests that nobody answered: sent again with the same key, they are not done twice.
  const unanswered = new Map();

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-send]:not(form)");
    if (button) act(button, () => button.dataset.body);
  });
  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-send]");
    if (!form) return;
    event.preventDefault();
    act(form, () => JSON.stringify(bodyOf(form)), event.submitter);
  });

  // A checkbox is true or false; data-type="number" or type=number a number, data-type="json" what it says; one left empty
  // is left out.
  function bodyOf(form) {
    const body = {};
    for (const field of form.elements) {
      if (!field.name || field.disabled) continue;
      if (field.type === "checkbox") body[field.name] = field.checked;
      else if (field.type === "radio" ? !field.checked : field.value === "") continue;
      else if (field.type === "number" || field.dataset.type === "number") body[field.name] = Number(field.value);
      else body[field.name] = field.dataset.type === "json" ? fromJson(field) : field.value;
    }
    return body;
  }

  function fromJson(field) {
    try {
      return JSON.parse(field.value);
    } catch (error) {
      throw new Error(`${field.name} is no JSON: ${error.message}`);
    }
  }

  async function act(element, body, submitter = element) {
    const { send, confirm, done, refresh, then } = element.dataset;
    const label = submitter?.textContent.trim() || "Send";
    if (underWay.has(send) || (confirm && !(await agreed(confirm, label)))) return;
    const buttons = element.matches("form") ? [...element.querySelectorAll("button")] : [element];
    underWay.add(send);
    mark(buttons, true);
    say(`${label}: under way…`);
    try {
      const [method, path] = send.split(" ");
      const told = await request(method, path, body());
      if (told.status === 401) {
        location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
        return;
      }
      if (!told.ok) {
        say(`${label}: refused. ${told.detail}`, "bad");
        return;
      }
      say(done || `${label}: done.`, "ok");
      element.dispatchEvent(new CustomEvent("answered", { bubbles: true, detail: told.body }));
      if (then || !document.querySelector(refresh || "none")) sessionStorage.setItem(SAID, answer.querySelector("span").textContent);
      if (then) location.assign(then);
      else await window.refresh(refresh);
    } catch (error) {
      say(`${label}: ${error.message}`, "bad");
    } finally {
      underWay.delete(send);
      mark(buttons, false);
      // The button may be gone: whoever came by keyboard goes on from the answer, not from the top of the page.
      if (document.activeElement === document.body) answer.focus();
    }
  }

  // Not `disabled`, which would take the focus from under whoever pressed it.
  function mark(buttons, isUnderWay) {
    for (const button of buttons) {
      if (isUnderWay) button.setAttribute("aria-disabled", "true");
      else button.removeAttribute("aria-disabled");
    }
  }

  // One request: {ok, status, body, detail}. Throws a sentence where no answer came.
  // `headers`: more of them, as If-Match.
  async function request(method, path, body, headers = {}) {
    const what = `${method} ${path} ${body}`;
    const key = unanswered.get(what) ?? hexDigits();
    unanswered.set(what, key);
    let told;
    try {
      told = await fetch(path, {
        method, body,
        headers: { ...headers, "Content-Type": "application/json", "Idempotency-Key": key, Accept: "application/json" },
      });
    } catch {
      throw new Error("no answer came, so it may be done or not. Look, then press again: it is not done twice.");
    }
    unanswered.delete(what);
    const text = await told.text();
    const json = /json/.test(told.headers.get("Content-Type") ?? "") && text ? JSON.parse(text) : null;
    const detail = told.ok ? "" : json?.detail ?? `The server answered ${told.status} and gave no reason: see its log.`;
    return { ok: told.ok, status: told.status, body: json, detail };
  }

  function hexDigits() {
    return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  }

  function agreed(what, label) {
    document.getElementById("confirm-what").textContent = what;
    document.getElementById("confirm-go").textContent = label;
    dialog.returnValue = "";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "go"), { once: true });
    });
  }

  // What was said before the page came anew is said on the next one.
  const before = sessionStorage.getItem(SAID);
  sessionStorage.removeItem(SAID);
  if (before) say(before, "ok");

  function say(text, tone = "") {
    answer.className = `answer ${tone}`;
    answer.querySelector("span").textContent = text;
    answer.hidden = false;
  }

  answer.querySelector("button").addEventListener("click", () => { answer.hidden = true; });
  window.actions = { request, say, agreed };
})();
