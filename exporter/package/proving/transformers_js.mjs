// Write the texts of a batch with Transformers.js: node transformers_js.mjs FOLDER
//
// in:  {ids, mask: rows of one length, tokens: to write} on stdin
// out: {version, rows: tokens of each text} on stdout, or {missing} where there is no such library
//
// The library is that of the current directory.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname } from "node:path";

const NAME = "@huggingface/transformers";
const folder = process.argv[2];
const { ids, mask, tokens } = JSON.parse(readFileSync(0, "utf8"));
const say = (found) => process.stdout.write(JSON.stringify(found));

let library;
try {
  library = createRequire(`${process.cwd()}/`)(NAME);
} catch (error) {
  say({ missing: `${error.message}`.split("\n")[0] });
  process.exit(0);
}
const { AutoModelForCausalLM, Tensor, env } = library;
env.allowRemoteModels = false;
env.localModelPath = `${dirname(folder)}/`;
const matrix = (rows) =>
  new Tensor("int64", BigInt64Array.from(rows.flat().map(BigInt)), [rows.length, rows[0].length]);
const model = await AutoModelForCausalLM.from_pretrained(basename(folder), { dtype: "auto" });
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
