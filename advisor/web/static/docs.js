"use strict";
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, defaultModelsExpandDepth: 0, validatorUrl: null });
