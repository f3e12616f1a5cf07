// Write the texts of a batch with Transformers.js: node transformers_js.mjs PLACE NAME
//
// PLACE/NAME is a model's folder.
//
// in:  {ids, mask: rows of one length, tokens: to write} on stdin
// out: {version, rows: tokens of each text} on stdout, or {missing} where there is no such library
//
// The library is that of the current directory.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const LIBRARY = "@huggingface/transformers";
const [place, name] = process.argv.slice(2);
const { ids, mask, tokens } = JSON.parse(readFileSync(0, "utf8"));
const say = (found) => process.stdout.write(JSON.stringify(found));

let library;
try {
  library = createRequire(`${process.cwd()}/`)(LIBRARY);
} catch (error) {
  say({ missing: `${error.message}`.split("\n")[0] });
  process.exit(0);
}
const { AutoModelForCausalLM, Tensor, env } = library;
env.allowRemoteModels = false;
env.localModelPath = `${place}/`;
const matrix = (rows) =>
  new Tensor("int64", BigInt64Array.from(rows.flat().map(BigInt)), [rows.length, rows[0].length]);
const model = await AutoModelForCausalLM.from_pretrained(name, { dtype: "auto" });
const found = await model.generate({
  inputs: matrix(ids),
  attention_mask: matrix(mask),
  max_new_tokens: tokens,
  do_sample: false,
});
const length = found.dims[1];
const all = Array.from(found.data, Number);
const rows = ids.map((row, i) => all.slice(i * length + row.length, (i + 1) * length));
say({ version: env.version, rows });
