"""Servers for editors and programs: one worker that owns a model, behind HTTP and LSP.

Start with `worker.Worker`, `app.Server` and `http.run`, `lsp.start`, `doctor.examine`.
"""
