// The requests of the server, as /openapi.json has them.

import { by, make } from "./dom.js";

const WORDS = { string: "text", integer: "whole number", number: "number", boolean: "true or false", object: "object", null: "null" };

/** Return an element with children, texts or elements. */
function built(tag, name, ...children) {
  const element = make(tag, name);
  element.append(...children);
  return element;
}
function link(name, text = name) {
  const element = make("a", "", text);
  element.href = `#${name}`;
  return element;
}
const mixed = (parts, between) => parts.flatMap((part, number) => number ? [between, ...part] : part);

/** Say what a value may be: texts and links. */
function kind(schema) {
  if (schema.$ref) return [link(schema.$ref.split("/").pop())];
  if (schema.anyOf) return mixed(schema.anyOf.filter((one) => one.type !== "null").map(kind), " or ");
  if (schema.enum || "const" in schema) return [(schema.enum ?? [schema.const]).map((one) => JSON.stringify(one)).join(" or ")];
  if (schema.maxItems === 0 || schema.maxProperties === 0 || schema.maxLength === 0) return ["empty"];
  if (schema.type === "array") return ["list of ", ...(Object.keys(schema.items ?? {}).length ? kind(schema.items) : ["anything"]), bounds(schema.minItems, schema.maxItems)];
  const types = [schema.type].flat().map((one) => WORDS[one] ?? one ?? "anything").join(" or ");
  return [types, bounds(schema.minimum, schema.maximum ?? schema.exclusiveMaximum)];
}
function bounds(...given) {
  const [low, high] = given.map((one) => Math.abs(one) > Number.MAX_SAFE_INTEGER ? undefined : one);
  if (low !== undefined && high !== undefined) return low === high ? `, ${low}` : `, ${low} to ${high}`;
  return low !== undefined ? `, ${low} or more` : high !== undefined ? `, ${high} at most` : "";
}

function table(heads, rows) {
  const head = built("tr", "", ...heads.map((text) => make("th", "", text)));
  const body = rows.map((cells) => built("tr", "", ...cells.map((cell) => built("td", "", ...[cell].flat()))));
  return built("div", "wide", built("table", "", built("thead", "", head), built("tbody", "", ...body)));
}
const idle = (schema) => "const" in schema || [schema.maxItems, schema.maxProperties, schema.maxLength].includes(0);

function fields(schema) {
  const needed = new Set(schema.required ?? []), rank = ([name, one]) => needed.has(name) ? 0 : idle(one) ? 2 : 1;
  const own = ([, one]) => "default" in one && !one.$ref ? make("code", "", JSON.stringify(one.default)) : "";
  const rows = Object.entries(schema.properties ?? {}).sort((a, b) => rank(a) - rank(b)).map((entry) => [
    make("code", "", entry[0]), kind(entry[1]), needed.has(entry[0]) ? "required" : own(entry), entry[1].description ?? "",
  ]);
  return table(["field", "value", "default", ""], rows);
}

const anchor = (method, path) => `${method}-${path.replace(/[^\w]+/g, "-")}`;

function operation(method, path, one, schemas) {
  const box = built("section", "", built("h2", "", make("code", "", `${method.toUpperCase()} ${path}`)));
  box.id = anchor(method, path);
  box.append(make("p", "", `${one.summary}.${one.security ? "" : " No key is needed."}`));
  const body = one.requestBody?.content["application/json"].schema, name = body?.$ref?.split("/").pop();
  if (one.parameters) box.append(table(["parameter", "value", "default"], one.parameters.map((own) => [
    make("code", "", own.name), kind(own.schema), own.required ? "required" : make("code", "", JSON.stringify(own.schema.default)),
  ])));
  if (name) {
    box.append(fields(schemas[name]));
    const sample = JSON.stringify(schemas[name].examples?.[0] ?? {});
    const key = one.security ? " -H 'Authorization: Bearer KEY'" : "";
    box.append(built("pre", "", make("code", "", `curl ${location.origin}${path}${key} -H 'Content-Type: application/json' -d '${sample}'`)));
  }
  box.append(table(["status", ""], Object.entries(one.responses).map(([status, own]) => {
    const kinds = Object.keys(own.content ?? {}), streamed = kinds.includes("text/event-stream");
    const about = status === "200" ? (streamed ? "The answer, as one object or a stream of server-sent events." : "The result of the request.") : own.description;
    return [status === "default" ? "other" : status, about];
  })));
  return box;
}

try {
  const found = await (await fetch("/openapi.json")).json(), { schemas } = found.components;
  by("base").textContent = `${location.origin}/v1`;
  const bodies = new Set();
  for (const [path, operations] of Object.entries(found.paths)) {
    for (const [method, one] of Object.entries(operations)) {
      by("index").append(built("li", "", link(anchor(method, path), `${method.toUpperCase()} ${path}`), ` ${one.summary}`));
      by("operations").append(operation(method, path, one, schemas));
      bodies.add(one.requestBody?.content["application/json"].schema.$ref?.split("/").pop());
    }
  }
  for (const [name, schema] of Object.entries(schemas)) {
    if (bodies.has(name)) continue;
    const own = schema;
    const box = built("section", "", make("h2", "", name), make("p", "", schema.description ?? ""), fields(own));
    box.id = name;
    by("schemas").append(box);
  }
  if (location.hash) by(location.hash.slice(1))?.scrollIntoView();
} catch {
  by("wrong").hidden = false;
  by("wrong").textContent = "The server does not respond.";
}
