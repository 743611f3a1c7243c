"use strict";
// Shows /openapi.json in Swagger UI. It is a file of its own because the page allows no inline script.

const key = sessionStorage.getItem("fminfer-key"); // which the page at / may have asked for

async function showDocs() {
  const answer = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (!answer.ok) throw new Error(`openapi.json: the server answered ${answer.status}`);
  const spec = await answer.json();
  // Swagger UI 4 refuses 3.1 by its number, but draws what our document has of it.
  spec.openapi = "3.0.3";
  const docs = SwaggerUIBundle({
    spec,
    dom_id: "#docs",
    deepLinking: true,
    onComplete: () => key && authorize(docs, spec),
  });
}

function authorize(docs, spec) {
  for (const [name, scheme] of Object.entries(spec.components?.securitySchemes ?? {})) {
    if (scheme.scheme === "bearer") docs.preauthorizeApiKey(name, key);
  }
}

showDocs().catch((error) => {
  document.getElementById("docs").textContent = error.message;
});
