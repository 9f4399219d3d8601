# Other versions of RabbitMQ than the distribution's, for ./dev: unpacked in .rabbitmq/VERSION, installed nowhere.
#
# FAREGATE_RABBITMQ says which: a version of the table below, or the path of a rabbitmq-server script. ./dev makes the
# path of a version, so whoever starts a server (the tests and the demo do) finds a path there, or nothing.
#
# - Each comes from Debian's archive with all that it needs, libc included. apt picks, fetches and checks it against the
#   archive's signed lists; its lists and packages lie in that folder too, so the machine's are not touched.
# - Erlang's programs are told where their libc is, and Erlang's scripts where Erlang is. Other programs of the folder
#   are not used.

DEBIAN_KEYS=/usr/share/keyrings/debian-archive-keyring.gpg

# rabbitmq_suite VERSION: the suite of Debian that has it.
rabbitmq_suite() {
    case $1 in
        4.0) printf 'trixie\n' ;;
        newest) printf 'sid\n' ;;
        *) say "there is no RabbitMQ $1 to fetch: take 4.0 or newest, or the path of a rabbitmq-server."; return 1 ;;
    esac
}

# choose_rabbitmq: makes a path of FAREGATE_RABBITMQ, or ends the script after a sentence.
choose_rabbitmq() {
    case ${FAREGATE_RABBITMQ:-} in
        '') return ;;
        */*) FAREGATE_RABBITMQ=$(realpath -m -- "$FAREGATE_RABBITMQ") ;;
        *) FAREGATE_RABBITMQ=$(fetch_rabbitmq "$FAREGATE_RABBITMQ") || exit 1 ;;
    esac
    [[ -x $FAREGATE_RABBITMQ ]] || die "FAREGATE_RABBITMQ: there is no program $FAREGATE_RABBITMQ."
    export FAREGATE_RABBITMQ
}

# fetch_rabbitmq VERSION: prints the path of its rabbitmq-server; returns 1 after a sentence when it cannot be had.
fetch_rabbitmq() {
    local folder=$ROOT/.rabbitmq/$1 suite
    suite=$(rabbitmq_suite "$1") || return 1
    (
        umask 022
        mkdir -p "$folder"
        flock 9
        # The folder's path is in its files, so a copy of it does not count.
        if [[ ! -f $folder/ready || $(<"$folder/ready") != "$folder" ]]; then
            rm -rf "${folder:?}"/*
            if [[ ! -f $DEBIAN_KEYS ]]; then install_packages "Debian's keys" debian-archive-keyring || exit 1; fi
            say "fetching RabbitMQ $1 from Debian $suite into .rabbitmq, once ..."
            with_progress "RabbitMQ $1" 0 "$ROOT/.rabbitmq/$1.log" unpack_rabbitmq "$folder" "$suite" 1>&2 || {
                say "RabbitMQ $1 could not be fetched: .rabbitmq/$1.log says why."
                exit 1
            }
            printf '%s\n' "$folder" >"$folder/ready"
        fi
        (as_service rabbitmq test -r "$folder/ready") || {
            say "the user $(service_user rabbitmq), as whom RabbitMQ runs, cannot read $folder: move the project."
            exit 1
        }
    ) 9<"$ROOT" || return 1
    printf '%s\n' "$folder"/root/usr/lib/rabbitmq/lib/*/sbin/rabbitmq-server
}

unpack_rabbitmq() {
    local folder=$1 suite=$2 package
    mkdir -p "$folder"/{root,lists/partial,archives/partial}
    printf 'deb [signed-by=%s] http://deb.debian.org/debian %s main\n' "$DEBIAN_KEYS" "$suite" >"$folder/sources.list"
    : >"$folder/status"
    local -a apt=(
        apt-get -y -o Dir::State="$folder" -o Dir::State::lists="$folder/lists" -o Dir::State::status="$folder/status"
        -o Dir::Cache="$folder" -o Dir::Etc::SourceList="$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::Etc::PreferencesParts=/dev/null -o Acquire::Languages=none -o APT::Sandbox::User=root
        -o Debug::NoLocking=true
    )
    "${apt[@]}" -o APT::Update::Error-Mode=any update &&
        "${apt[@]}" --no-install-recommends --download-only install rabbitmq-server patchelf || return 1
    for package in "$folder"/archives/*.deb; do
        printf 'Unpacking %s\n' "${package##*/}"
        dpkg-deb -x "$package" "$folder/root" || return 1
    done
    move_erlang "$folder/root" && rm -r "$folder/archives" "$folder/lists"
}

# move_erlang ROOT: lets the Erlang below ROOT run from there. The scripts of RabbitMQ find it beside them.
move_erlang() {
    local libraries loader file sbin
    libraries=$(dirname "$1"/usr/lib/*/libc.so.6)
    loader=$(echo "$libraries"/ld-linux*.so.*)
    while read -r file; do
        if [[ $(head -c 2 "$file") == '#!' ]]; then
            sed -i "s#/usr/lib/erlang#$1&#" "$file" || return 1
        else
            "$loader" --library-path "$libraries" "$1/usr/bin/patchelf" \
                --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$file" || return 1
        fi
    done < <(find "$1/usr/lib/erlang" -type f -path '*/bin/*' -executable)
    sbin=$(dirname "$1"/usr/lib/rabbitmq/lib/*/sbin/rabbitmq-server)
    ln -s "$1"/usr/lib/erlang/bin/{erl,escript,epmd} "$sbin"
}
