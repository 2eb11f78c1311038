"""Values as people read them: tables, titles, and foreign text made printable."""
