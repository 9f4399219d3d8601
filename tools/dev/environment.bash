# The Python environment and Java, for ./dev.
#
# One virtual environment, filled in three levels: demo < dev < bench. Each level is a lock file that contains the one
# below it at the same versions, so a higher level satisfies a lower one. Two stamps in .venv remember what was
# installed; while they match, nothing is run. Changes happen under a lock, on the project folder itself so that it
# needs no file.

LEVELS=(demo dev bench)
UV_VERSION=0.13.7

level_rank() {
    local rank
    for rank in "${!LEVELS[@]}"; do
        if [[ ${LEVELS[rank]} == "$1" ]]; then printf '%s\n' "$rank"; fi
    done
}

# A virtual environment holds absolute paths, so one that was copied along with the project does not count.
packages_stamp() {
    printf '%s\n%s\n' "$1" "$ROOT"
    sha256sum <"$ROOT/requirements/$1.lock"
}

project_stamp() { sha256sum <"$ROOT/pyproject.toml"; }

packages_are_current() {
    [[ -f $VENV/.packages-stamp && -x $VENV/bin/python ]] || return 1
    local installed
    read -r installed <"$VENV/.packages-stamp"
    (( $(level_rank "$installed") >= $(level_rank "$1") )) &&
        [[ $(<"$VENV/.packages-stamp") == "$(packages_stamp "$installed")" ]]
}

environment_is_current() {
    packages_are_current "$1" && [[ -f $VENV/.project-stamp && $(<"$VENV/.project-stamp") == "$(project_stamp)" ]]
}

# ensure_environment LEVEL: makes .venv hold at least this level; ends the script with a sentence when it cannot.
ensure_environment() {
    if environment_is_current "$1"; then return; fi
    (
        flock 9
        # Another ./dev may have done it while this one waited.
        if ! environment_is_current "$1"; then install_environment "$1" 9<&-; fi
    ) 9<"$ROOT"
}

install_environment() {
    rm -f "$VENV/.project-stamp"
    if ! packages_are_current "$1"; then install_packages_of "$1"; fi
    "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input \
        --no-deps --no-index --no-build-isolation --editable "$ROOT" ||
        die "the project could not be installed into .venv; pip says why above."
    project_stamp >"$VENV/.project-stamp"
}

install_packages_of() {
    if ! environment_is_usable; then create_environment; fi
    rm -f "$VENV/.packages-stamp"
    # pyspark comes as source, and pip builds it without isolation: its build tools have to be there first.
    install_lock build
    install_lock "$1"
    packages_stamp "$1" >"$VENV/.packages-stamp"
}

environment_is_usable() {
    # A copied environment has scripts that point to the original folder.
    grep -qsF "$VENV/bin/python" "$VENV/bin/pip" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1
}

create_environment() {
    local python
    python=$(find_python) ||
        die "Python 3.11 or newer is missing: install it with 'sudo apt-get install python3.11'."
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        local package
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        install_packages "the venv module of Python" "$package" || exit 1
    fi
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || die "'$python -m venv .venv' failed; its message is above."
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# A lock names everything, so pip resolves nothing: it would look for `psycopg[binary]`, which dbos wants, beyond the
# version that is locked without its extra, and refuse the newer one that it finds for having no hash.
install_lock() {
    local lock=$ROOT/requirements/$1.lock
    with_progress "requirements/$1.lock into .venv" "$(grep -c '^[a-z0-9]' "$lock")" "$VENV/install.log" \
        "$VENV/bin/python" -u -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --require-hashes --no-deps --no-build-isolation --requirement "$lock" ||
        die "the packages of requirements/$1.lock could not be installed; pip says why above, and in .venv/install.log."
}

# ensure_java: sets JAVA_HOME to a Java >= 17, which Spark needs; returns 1 after one sentence when there is none.
ensure_java() {
    if find_java; then return; fi
    local package=openjdk-17-jre-headless
    if ! has_package "$package"; then package=default-jre-headless; fi
    install_packages "Java 17 or newer" "$package" || return 1
    if ! find_java; then
        say "Java 17 or newer is missing after the installation of $package: set JAVA_HOME to one."
        return 1
    fi
}

find_java() {
    local java major
    for java in "${JAVA_HOME:-}/bin/java" "$(command -v java)" /usr/lib/jvm/*/bin/java; do
        [[ -x $java ]] || continue
        major=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p')
        if (( ${major:-0} >= 17 )); then
            java=$(readlink -f "$java")
            export JAVA_HOME=${java%/bin/java}
            return
        fi
    done
    return 1
}

# The widest level is solved first and binds the others, so that the three agree on every version.
lock_dependencies() {
    local python lock_env=$ROOT/.venv-lock
    python=$(find_python) || die "Python 3.11 or newer is missing."
    if [[ ! -x $lock_env/bin/uv || $("$lock_env/bin/uv" --version) != "uv $UV_VERSION"* ]]; then
        rm -rf "$lock_env"
        "$python" -m venv "$lock_env"
        "$lock_env/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "uv==$UV_VERSION" ||
            die "uv, which writes the lock files, could not be installed; pip says why above."
    fi
    cd "$ROOT"
    compile_lock bench pyproject.toml --all-extras --group build --group dev --group docs --group bench "$@"
    compile_lock dev pyproject.toml --all-extras --group build --group dev --group docs --constraints requirements/bench.lock "$@"
    compile_lock demo pyproject.toml --extra spark --group build --constraints requirements/bench.lock "$@"
    compile_lock build --group build --constraints requirements/bench.lock "$@"
}

compile_lock() {
    say "solving requirements/$1.lock ..."
    # Universal: one file for every supported Python. --no-config keeps registries of this machine out of the file.
    "$ROOT/.venv-lock/bin/uv" pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
        --annotation-style line --custom-compile-command './dev lock' \
        --output-file "requirements/$1.lock" "${@:2}" ||
        die "requirements/$1.lock could not be solved; the reason is above."
}
