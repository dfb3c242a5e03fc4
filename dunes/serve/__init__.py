"""Servers for editors and programs: one worker that owns a model, behind HTTP and the language server protocol."""
