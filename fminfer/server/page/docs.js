"use strict";
// Shows /openapi.json in Swagger UI. It is a file of its own because the page allows no inline script.

const key = sessionStorage.getItem("fminfer-key"); // which the page at / may have asked for

/** Say in OpenAPI 3.0, which Swagger UI 4 knows, what a document says in 3.1. */
function inVersion30(value) {
  if (Array.isArray(value)) return value.map(inVersion30);
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).map(([name, part]) => [name, inVersion30(part)]);
  const { type, examples, ...rest } = Object.fromEntries(entries);
  const said = Array.isArray(examples) ? { example: examples[0] } : examples ? { examples } : {};
  if (!Array.isArray(type)) return { ...(type && { type }), ...said, ...rest };
  const types = type.filter((each) => each !== "null");
  const one = types.length === 1 ? { type: types[0] } : { anyOf: types.map((each) => ({ type: each })) };
  return { ...one, nullable: types.length < type.length, ...said, ...rest };
}

async function showDocs() {
  const answer = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (!answer.ok) throw new Error(`openapi.json: the server answered ${answer.status}`);
  const spec = { ...inVersion30(await answer.json()), openapi: "3.0.3" };
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
