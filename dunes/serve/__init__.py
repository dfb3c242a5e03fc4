"""Servers for editors and programs: one worker thread owns the models and answers over HTTP and LSP.

Start with `worker.Worker`, `app.Server` and `http.run`, `lsp.start`, `doctor.examine`.
"""
