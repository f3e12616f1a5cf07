// Write texts under node: node generate_node.mjs PACKAGES JOBS.json
//
// job = {folder, asked, result}: of models, what is asked (see generate.mjs), file of the answer

import { writeFile, readFile } from "node:fs/promises";
import { createRequire } from "node:module";

import { generate } from "./generate.mjs";

const [packages, jobs] = process.argv.slice(2);
const library = createRequire(`${packages}/`)("@huggingface/transformers");
library.env.allowRemoteModels = false;
for (const job of JSON.parse(await readFile(jobs, "utf8"))) {
  library.env.localModelPath = job.folder;
  await writeFile(job.result, JSON.stringify(await generate(library, job.asked)));
}
