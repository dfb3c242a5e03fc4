"""Editor settings for this server."""

import json


def url(host: str, port: int) -> str:
    """The URL of a server that listens on `host`; a wildcard address becomes the loopback address."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host.strip("[]"), host)
    return f"http://[{name}]:{port}" if ":" in name and not name.startswith("[") else f"http://{name}:{port}"


def config(editor: str, address: str, model: str) -> str:
    """The settings of an editor as text; `model` is the absolute path of the folder."""
    # JSON strings are also valid TOML.
    escaped = model.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    lua, toml = f"'{escaped}'", json.dumps(model, ensure_ascii=False)
    # llama.vim needs no setting for its default address.
    is_default = address == "http://127.0.0.1:8012"
    vim = "" if is_default else f"let g:llama_config = {{'endpoint_fim': '{address}/infill'}}\n"
    return _LINES[editor].format(address=address, lua=lua, toml=toml, vim=vim)


_LINES = {
    "vim": """\
" ~/.vimrc: the plugin llama.vim (https://github.com/ggml-org/llama.vim), for example with vim-plug.
{vim}Plug 'ggml-org/llama.vim'
""",
    "nvim": """\
-- ~/.config/nvim/init.lua (Neovim 0.12): no plugin or server. If 'dunes' is not on the PATH, write its full path.
vim.lsp.config('dunes', {{ cmd = {{ 'dunes', 'lsp', {lua} }} }})
vim.lsp.enable('dunes')
vim.lsp.inline_completion.enable()
vim.keymap.set('i', '<Tab>', function()
  if not vim.lsp.inline_completion.get() then return '<Tab>' end
end, {{ expr = true }})
""",
    "vscode": """\
// settings.json, for the extension llama-vscode. With Python files alone it starts when its side bar is opened.
"llama-vscode.endpoint": "{address}",
"llama-vscode.ask_install_llamacpp": false
""",
    "zed": """\
// ~/.config/zed/settings.json
"edit_predictions": {{
  "provider": "open_ai_compatible_api",
  "open_ai_compatible_api": {{
    "api_url": "{address}/v1/completions", "model": "dunes", "prompt_format": "qwen", "max_output_tokens": 64
  }}
}}
""",
    "emacs": """\
;; ~/.emacs.d/init.el, for minuet (https://github.com/milanglacier/minuet-ai.el)
(use-package minuet
  :config
  (setq minuet-provider 'openai-fim-compatible)
  (plist-put minuet-openai-fim-compatible-options :end-point "{address}/v1/completions")
  (plist-put minuet-openai-fim-compatible-options :name "dunes")
  (plist-put minuet-openai-fim-compatible-options :api-key "TERM")
  (plist-put minuet-openai-fim-compatible-options :model "dunes")
  (define-key minuet-active-mode-map (kbd "TAB") #'minuet-accept-suggestion)
  (add-hook 'prog-mode-hook #'minuet-auto-suggestion-mode))
""",
    "helix": """\
# ~/.config/helix/languages.toml: name your languages. If dunes is not on the PATH, write its full path.
[language-server.dunes]
command = "dunes"
args = ["lsp", {toml}]

[[language]]
name = "python"
language-servers = ["dunes"]
""",
}
