#!/usr/bin/env bash
# A tool of an `MCPServer` of mcp 2.3.0 takes arguments that it does not have: `top_n` for `top_k` is dropped, the default
# is used, and the call succeeds. The tool's schema has no `additionalProperties: false`, so clients cannot see it either.
# Wrong types are an error. Expected: an error that names the argument, or a schema that forbids it.
#
# Seen on 29 November 2026 with Python 3.11.7 on Linux x86_64:
#     2.3.0: search(top_n=50) gave "5 hits", error False; additionalProperties is not set
#     2.3.0: search(top_k="many"): error True
set -euo pipefail
unset PYTHONPATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "mcp==2.3.0"

cat > "$folder/unknown.py" <<'PYTHON'
import asyncio
from importlib.metadata import version

from mcp import Client
from mcp.server.mcpserver import MCPServer

server = MCPServer("search")


@server.tool()
def search(query: str, top_k: int = 5) -> str:
    """Search."""
    return f"{top_k} hits"


async def main() -> None:
    async with Client(server) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("search", {"query": "x", "top_n": 50})
        closed = "is set" if "additionalProperties" in tool.input_schema else "is not set"
        print(f'{version("mcp")}: search(top_n=50) gave "{result.content[0].text}", error {result.is_error}; '
              f"additionalProperties {closed}")
        wrong = await client.call_tool("search", {"query": "x", "top_k": "many"})
        print(f'{version("mcp")}: search(top_k="many"): error {wrong.is_error}')


asyncio.run(main())
PYTHON

said=$("$folder/venv/bin/python" "$folder/unknown.py" 2> /dev/null)
echo "$said"
if ! grep -q 'top_n=50) gave "5 hits", error False; additionalProperties is not set' <<< "$said"; then
    echo "changed: unknown arguments are no longer dropped"
    exit 1
fi
