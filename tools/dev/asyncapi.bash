# The official JSON Schema of AsyncAPI documents, for ./dev test: in .venv, exported as FAREGATE_TEST_ASYNCAPI.
#
# AsyncAPI publishes it in a package of npm alone. npm fetches that once; it is checked against the hash below, and
# nothing of it is run. Without npm or a network the test that needs it says so itself: it skips here and fails in CI.

ASYNCAPI_PACKAGE=@asyncapi/specs@6.11.1
ASYNCAPI_SHA512=0375812ea00a1a8276fba15616da63065090d6814272ce06c45ef3b081af36aa7f9251941e3940dda01c67d5cc3292c613cccf7980f3db1f4598ee834ae2ab69
ASYNCAPI_SCHEMA=package/schemas/3.0.0.json

# ensure_asyncapi: returns 1 after one sentence when the schema cannot be had.
ensure_asyncapi() {
    local file=$VENV/share/asyncapi/3.0.0.json
    if [[ ! -f $file ]]; then
        if ! command -v npm >/dev/null; then install_packages npm npm || return 1; fi
        (fetch_asyncapi "$file") || {
            say "the schema of AsyncAPI could not be fetched; the reason is above."
            return 1
        }
    fi
    export FAREGATE_TEST_ASYNCAPI=$file
}

# In a shell of its own, which removes what it fetched.
fetch_asyncapi() {
    local package
    ASYNCAPI_FOLDER=$(mktemp -d)
    trap 'rm -rf "$ASYNCAPI_FOLDER"' EXIT
    cd "$ASYNCAPI_FOLDER"
    package=$(npm pack --silent --ignore-scripts "$ASYNCAPI_PACKAGE") &&
        sha512sum --quiet --check <<<"$ASYNCAPI_SHA512  $package" &&
        tar -xzf "$package" "$ASYNCAPI_SCHEMA" &&
        mkdir -p "${1%/*}" &&
        mv "$ASYNCAPI_SCHEMA" "$1"
}
