"""A plugin of pytest that is loaded before all others: they start in half the time.

`nbval` imports `nbformat`, and that `jsonschema`, which prepares a grammar of internationalised
addresses. That takes two seconds in every process, and no notebook has a field of that format.
Where the package of the grammar is missing, `jsonschema` does without.
"""

import sys

sys.modules.setdefault("rfc3987_syntax", None)
