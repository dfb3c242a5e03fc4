#!/usr/bin/env bash
# Unpacks Neovim and the plugin llama.vim from Debian's unstable packages into a folder, beside the system's own.
set -euo pipefail
out=$(realpath -m "$1")
mirror=$(grep -rhoE "https?://[^ ]+/debian/?( |$)" /etc/apt/sources.list /etc/apt/sources.list.d/ 2>/dev/null | head -1 | tr -d " " || true)
[ -n "$mirror" ] || { echo "this system has no Debian packages" >&2; exit 1; }
mkdir -p "$out"/apt/{lists,cache/archives}/partial
touch "$out/apt/status"
echo "deb [trusted=yes] $mirror sid main" > "$out/apt/sources.list"
apt() {
  apt-get -qq -o Dir::State::lists="$out/apt/lists" -o Dir::State::status="$out/apt/status" -o Dir::Cache="$out/apt/cache" \
    -o Dir::Etc::sourcelist="$out/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User=root "$@"
}
apt update
apt --download-only -y --no-install-recommends install "${@:2}"
for package in "$out"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$out"; done
rm -r "$out/apt"
