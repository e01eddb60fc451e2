#!/usr/bin/env bash
# zensical 0.0.73 reads mkdocs.yml, but ignores its `hooks:` without a word, also under --strict: the build says "No
# issues found" and ends with status 0, and the page lacks what the hook adds. MkDocs 1.6.1 runs the same hook.
#
# Seen on 28 November 2026 with Python 3.11.7 on Linux x86_64:
#     mkdocs: the hook ran
#     Build started
#     No issues found
#     Build finished in 0.17s
#     zensical: status 0, the hook did not run
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mkdocs==1.6.1 zensical==0.0.73

mkdir -p "$folder/site/docs"
cd "$folder/site"
echo "# Start" > docs/index.md
cat > mkdocs.yml <<'YAML'
site_name: Hooks
hooks: [hooks.py]
YAML
cat > hooks.py <<'PYTHON'
def on_page_markdown(markdown, **_):
    return markdown + "\n\nThe hook ran.\n"
PYTHON

"$folder/venv/bin/mkdocs" build --strict --quiet --site-dir with_mkdocs
grep --quiet "The hook ran" with_mkdocs/index.html
echo "mkdocs: the hook ran"

"$folder/venv/bin/zensical" build --strict
if grep --quiet "The hook ran" site/index.html; then
    echo "changed: zensical runs hooks"
    exit 1
fi
echo "zensical: status 0, the hook did not run"
