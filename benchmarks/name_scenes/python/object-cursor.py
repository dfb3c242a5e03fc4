"""A store of notes."""

import sqlite3


def add_tag(connection, note, tag):
    cursor = connection.cursor()
    cursor.execute("INSERT INTO tags VALUES (?, ?)", (note, tag))
    cursor.close()
    connection.commit()


def remove_note(database, note):
    statement = database.cursor()
    statement.execute("DELETE FROM notes WHERE name = ?", (note,))
    ▏statement.close()▕
    database.commit()
