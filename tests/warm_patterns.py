"""Import to compile the patterns of file names and entries, before processes are forked."""

from ckptctl.formats.frameworks.file_names import FILES, matches
from ckptctl.formats.frameworks.state_keys import kind_of_entry

for layout in {row.layout for row in FILES}:
    matches("a file that no framework writes", layout)
kind_of_entry(("an entry",))
