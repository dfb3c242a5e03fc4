"""Bytes on disk: atomic writes, staging folders, locks, JSON, JSON lines, and files of untrusted model folders.

Start with `atomic.write_file`, `atomic.replace_file`, `atomic.staging_folder`, `atomic.folder_lock`,
`json_file.read`, `json_file.read_records` and `json_file.append_record`.
"""
