// Runs the function of the page docs/protocol.md: node page.js PAGE prints the ids of the table that comes on stdin.
"use strict";

const fs = require("node:fs");

const code = /```js\n([\s\S]*?)```/.exec(fs.readFileSync(process.argv[2], "utf8"))[1];
const expand = new Function(`${code}; return expand;`)();
const { table, ...rest } = JSON.parse(fs.readFileSync(0, "utf8"));
console.log(JSON.stringify(expand({ table: Buffer.from(table, "base64"), ...rest })));
