"use strict";
(() => {
  // Swagger UI goes dark by a class, not by the reader's preference.
  function follow() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const { theme } = document.documentElement.dataset;
    document.documentElement.classList.toggle("dark-mode", theme ? theme === "dark" : dark);
  }
  follow();
  document.addEventListener("themechange", follow);
  SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, defaultModelsExpandDepth: 0, validatorUrl: null });
})();
