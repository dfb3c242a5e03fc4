"""Servers for editors and programs: HTTP and LSP in front of one worker, which runs the models.

Start with `worker.Worker`, `app.Server` and `http.run`, `lsp.start`, `doctor.examine`.
"""
