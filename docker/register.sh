#!/bin/sh
# Register a base model and every PEFT folder below another folder, each under its folder's name. Repeating it changes
# nothing. Where: LORAPLEX_REGISTRY. What: BASE_DIR, BASE_ID, ADAPTERS_DIR (may be empty or absent).
set -eu
python -m loraplex.cli base add "$BASE_DIR" --id "$BASE_ID"
refused=0
for folder in "${ADAPTERS_DIR:-/adapters}"/*/; do
    [ -f "$folder/adapter_config.json" ] || continue
    python -m loraplex.cli adapter add "$(basename "$folder")" "$folder" --base-id "$BASE_ID" --no-wait || refused=1
done
exit "$refused"
