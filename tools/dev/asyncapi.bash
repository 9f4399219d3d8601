# The official JSON Schema of AsyncAPI documents, for ./dev test: in .venv, exported as FAREGATE_TEST_ASYNCAPI.
#
# AsyncAPI publishes it in a package of npm alone. That is fetched once, checked against the hash below, and nothing of it
# is run. Without a network the test that needs it says so itself: it skips here and fails in CI.

ASYNCAPI_PACKAGE=https://registry.npmjs.org/@asyncapi/specs/-/specs-6.11.1.tgz
ASYNCAPI_SHA512=0375812ea00a1a8276fba15616da63065090d6814272ce06c45ef3b081af36aa7f9251941e3940dda01c67d5cc3292c613cccf7980f3db1f4598ee834ae2ab69
ASYNCAPI_SCHEMA=package/schemas/3.0.0.json

# ensure_asyncapi: returns 1 after one sentence when the schema cannot be had.
ensure_asyncapi() {
    local file=$VENV/share/asyncapi/3.0.0.json
    if [[ ! -f $file ]]; then
        "$VENV/bin/python" - "$ASYNCAPI_PACKAGE" "$ASYNCAPI_SHA512" "$ASYNCAPI_SCHEMA" "$file" <<'PYTHON' || {
import hashlib, io, os, sys, tarfile, urllib.request
from pathlib import Path
url, sha512, member, file = sys.argv[1:]
with urllib.request.urlopen(url, timeout=60) as answer:
    package = answer.read()
if hashlib.sha512(package).hexdigest() != sha512:
    sys.exit(f"{url} is not the file that was chosen: its hash differs")
content = tarfile.open(fileobj=io.BytesIO(package)).extractfile(member).read()
path = Path(file)
path.parent.mkdir(parents=True, exist_ok=True)
part = path.with_suffix(f".{os.getpid()}")
part.write_bytes(content)
part.rename(path)
PYTHON
            say "the schema of AsyncAPI could not be fetched; the reason is above."
            return 1
        }
    fi
    export FAREGATE_TEST_ASYNCAPI=$file
}
