// The settings form: shows what differs from what is in force, asks, and sends that alone.
"use strict";
(() => {
  const form = document.getElementById("change");
  if (!form) return;

  const fields = () => [...form.elements].filter((field) => field.dataset.now !== undefined);

  // As JSON. Throws a sentence for a list that is none.
  function valueOf(field) {
    if (field.type === "checkbox") return field.checked;
    if (field.type === "number") return Number(field.value);
    if (field.tagName !== "TEXTAREA") return field.value;
    try {
      return JSON.parse(field.value);
    } catch (error) {
      throw new Error(`${field.name} is no JSON: ${error.message}`);
    }
  }

  function nowOf(field) {
    return field.tagName === "SELECT" ? field.dataset.now : JSON.parse(field.dataset.now);
  }

  function differences() {
    const found = [];
    for (const field of fields()) {
      const [value, now] = [valueOf(field), nowOf(field)];
      if (JSON.stringify(value) !== JSON.stringify(now)) found.push({ field, value, now });
    }
    return found;
  }

  function said(value) {
    return typeof value === "string" ? value : typeof value === "boolean" ? (value ? "yes" : "no") : JSON.stringify(value);
  }

  form.addEventListener("input", () => {
    for (const field of fields()) {
      let differs = true;
      try {
        differs = JSON.stringify(valueOf(field)) !== JSON.stringify(nowOf(field));
      } catch { /* half a list is typed: it differs */ }
      document.getElementById(`row-${field.name}`).classList.toggle("differs", differs);
    }
  });
  form.addEventListener("reset", () => {
    for (const row of form.querySelectorAll(".differs")) row.classList.remove("differs");
  });

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { say, agreed, request } = window.actions;
    if (form.getAttribute("aria-busy") === "true") return;
    form.setAttribute("aria-busy", "true");
    try {
      const found = differences();
      if (!found.length) return say("Nothing differs from what is in force.");
      const lines = found.map(({ field, value, now }) => `${field.name}: ${said(now)} → ${said(value)}`);
      const question = `These settings change from the next tick on:\n${lines.join("\n")}`;
      if (!(await agreed(question, "Change them"))) return;
      const patch = Object.fromEntries(found.map(({ field, value }) => [field.name, value]));
      const answer = await request("PATCH", "/api/v1/policies", JSON.stringify(patch), { "If-Match": form.dataset.etag });
      if (answer.status === 401) return location.assign("/login?next=/settings");
      if (answer.ok) return location.reload();
      const stale = answer.status === 412 ? " Load the page anew to see them; what you typed is then lost." : "";
      say(`Change: refused. ${answer.detail}${stale}`, "bad");
    } catch (error) {
      say(`Change: ${error.message}`, "bad");
    } finally {
      form.removeAttribute("aria-busy");
    }
  });
})();
