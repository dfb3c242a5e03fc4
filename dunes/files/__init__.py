"""Bytes on disk: atomic writes, staging folders, locks, JSON and JSON lines, and trust in cards.

Start with `atomic.write_file`, `atomic.replace_file`, `atomic.staging_folder`, `atomic.folder_lock`,
`json_file.read`, `json_file.read_records` and `json_file.append_record`.
"""
