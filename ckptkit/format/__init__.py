"""Documents: names, leaves, packs, records, manifests and zarr.json, as schemas/FORMAT.md has
them.
"""

from __future__ import annotations
