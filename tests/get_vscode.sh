#!/usr/bin/env bash
# Installs code-server and the extension llama-vscode into a folder, for tests/test_editors.py ($DUNES_VSCODE).
# The extension is that of Open VSX, or with a second argument, built from its sources in that folder.
# Needed beside Node's npm: a C++ compiler, libkrb5-dev, and Chromium to look at the editor.
set -euo pipefail
out=$(realpath -m "$1")
mkdir -p "$out/extensions"
cd "$out"
npm install --silent --prefix "$out" node@24
export PATH="$out/node_modules/node/bin:$PATH"
npm install --silent --prefix "$out" code-server
if [ $# -lt 2 ]; then
  node_modules/.bin/code-server --extensions-dir "$out/extensions" --install-extension ggml-org.llama-vscode
else
  cp -r "$2" "$out/source" && cd "$out/source"
  npm install --silent --ignore-scripts && npm run bundle
  mkdir "$out/extensions/ggml-org.llama-vscode" && cp -r dist package.json resources ui "$_"
fi
