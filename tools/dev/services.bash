# The private PostgreSQL and RabbitMQ, for ./dev: who uses them, and what their starts and stops have in common.
# postgres.bash and rabbitmq.bash add find_NAME, install_NAME, start_NAME and stop_NAME.
#
# - Each server has its own folder, free ports on 127.0.0.1 and a generated password, and starts empty every time:
#   nothing is left of an earlier run and nothing is shared with a server of the machine.
# - As root, the servers run as their packages' unprivileged users. Where such a user cannot reach the project folder,
#   its data goes below /var/tmp; .services/NAME.home says where.
# - .services/NAME.url exists while ./dev holds NAME to be up.
# - fd 9 is the lock on the state in .services. fd 8 on .services/users is shared by everyone who uses the servers:
#   who can take it alone is the last one and stops them, unless `services up` left .services/keep.
#   No server may inherit either, or the lock would live as long as the server.

SERVICE_NAMES=(postgres rabbitmq)
RESERVED_PORTS=' '

# --- who uses the services -------------------------------------------------------------------------------------------

# borrow_services: up until this script ends, however it ends; exports the FAREGATE_TEST_* addresses.
borrow_services() {
    mkdir -p "$SERVICES"
    exec 8>>"$SERVICES/users"
    flock -s 8
    trap return_services EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    choose_rabbitmq
    refuse_another_rabbitmq
    # A service that cannot run was named in a sentence; its tests skip, or fail in CI.
    start_services || true
    export_services
}

return_services() {
    local status=$?
    trap '' INT TERM HUP
    exec 8>&-
    stop_unused_services
    exit "$status"
}

keep_services() {
    mkdir -p "$SERVICES"
    choose_rabbitmq
    refuse_another_rabbitmq
    : >"$SERVICES/keep"
    start_services
}

# One that runs may be in use.
refuse_another_rabbitmq() {
    if service_is_up rabbitmq && [[ $(<"$SERVICES/rabbitmq.server") != "$(find_rabbitmq)" ]]; then
        die "another RabbitMQ is up, $(<"$SERVICES/rabbitmq.server"): './dev services down' stops it."
    fi
}

drop_services() {
    if [[ ! -d $SERVICES ]]; then return; fi
    rm -f "$SERVICES/keep"
    if services_in_use; then
        say "a running ./dev uses the services: they stop when it ends."
    else
        stop_unused_services
    fi
}

services_in_use() {
    [[ -e $SERVICES/users ]] && ! flock -n -x "$SERVICES/users" true
}

stop_unused_services() {
    (
        flock 9
        exec 8>>"$SERVICES/users"
        if [[ ! -e $SERVICES/keep ]] && flock -n -x 8; then
            stop_service postgres 8>&- 9<&- &
            stop_service rabbitmq 8>&- 9<&- &
            wait
        fi
    ) 9<"$SERVICES"
}

export_services() {
    local variable file
    while read -r variable file; do
        if [[ -z ${!variable:-} && -f $SERVICES/$file ]]; then
            export "$variable=$(<"$SERVICES/$file")"
        fi
    done < <(service_variables)
}

service_variables() {
    printf '%s\n' \
        'FAREGATE_TEST_POSTGRES postgres.url' \
        'FAREGATE_TEST_RABBITMQ rabbitmq.url' \
        'FAREGATE_TEST_RABBITMQ_STREAM rabbitmq-stream.url'
}

# show_services: returns 1 unless all are up.
show_services() {
    local variable file name all_up=0
    while read -r variable file; do
        name=${file%%[-.]*}
        if service_is_up "$name"; then
            printf '%-9s up    %s=%s\n' "$name" "$variable" "$(<"$SERVICES/$file")"
        else
            printf '%-9s down  %s\n' "$name" "$variable"
            all_up=1
        fi
    done < <(service_variables)
    return "$all_up"
}

# --- starting and stopping -------------------------------------------------------------------------------------------

# start_services: returns 1 when one of them could not be started. Ctrl-C waits until the start is over, so that a
# half-started server is never left behind.
start_services() {
    (
        trap '' INT
        flock 9
        local name status=0
        local -a jobs=()
        for name in "${SERVICE_NAMES[@]}"; do
            if service_is_wanted "$name" && ! service_is_up "$name"; then
                stop_service "$name"
                if ensure_installed "$name"; then jobs+=("$name"); else status=1; fi
            fi
        done
        (( ${#jobs[@]} == 0 )) || say "starting ${jobs[*]} ..."
        local -a pids=()
        for name in "${jobs[@]}"; do
            start_service "$name" 8>&- 9<&- &
            pids+=("$!")
        done
        local pid
        for pid in "${pids[@]}"; do wait "$pid" || status=1; done
        exit "$status"
    ) 9<"$SERVICES"
}

# ensure_installed NAME: returns 1 after one sentence when it cannot be installed.
ensure_installed() { "find_$1" >/dev/null || "install_$1"; }

# An address that is already set names a server to use instead.
service_is_wanted() {
    case $1 in
        postgres) [[ -z ${FAREGATE_TEST_POSTGRES:-} ]] ;;
        rabbitmq) [[ -z ${FAREGATE_TEST_RABBITMQ:-} || -z ${FAREGATE_TEST_RABBITMQ_STREAM:-} ]] ;;
    esac
}

service_is_up() {
    [[ -f $SERVICES/$1.url && -f $SERVICES/$1.home ]] &&
        service_process_is_ours "$1" &&
        accepts_connections "$(port_of "$1")"
}

# Between two tries the ports change: another program may have taken one since it was found free.
start_service() {
    local name=$1 try
    # Each service draws from its own half, since both start at the same time.
    case $name in
        postgres) RANDOM=$(( $$ * 2 )) ;;
        rabbitmq) RANDOM=$(( $$ * 2 + 1 )) ;;
    esac
    for try in 1 2 3; do
        make_home "$name"
        if "start_$name"; then return 0; fi
        (( try < 3 )) && stop_service "$name"
    done
    say "$name did not start: the logs in $(<"$SERVICES/$name.home") say why."
    return 1
}

stop_service() {
    local name=$1 home
    [[ -f $SERVICES/$name.home ]] || return 0
    home=$(<"$SERVICES/$name.home")
    "stop_$name" "$home"
    rm -f "$SERVICES/$name.url" "$SERVICES/$name-stream.url" "$SERVICES/$name.home"
    # Only a folder that make_home made may go.
    case $home in
        "$SERVICES/$name" | /var/tmp/faregate-"$name".??????) rm -rf "$home" ;;
    esac
}

service_user() {
    if (( EUID != 0 )); then
        id -un
    elif id -u "$1" >/dev/null 2>&1; then
        printf '%s\n' "$1"
    else
        printf 'nobody\n'
    fi
}

# as_service NAME COMMAND...: as the unprivileged user of the service, away from a folder it may not be able to read.
as_service() {
    local user
    user=$(service_user "$1")
    shift
    cd /
    if (( EUID == 0 )); then
        setpriv --reuid="$user" --regid="$(id -g "$user")" --clear-groups -- "$@"
    else
        "$@"
    fi
}

make_home() {
    local name=$1 home=$SERVICES/$1 user
    user=$(service_user "$name")
    rm -rf "$home"
    mkdir -p "$home"
    chmod 700 "$home"
    if (( EUID == 0 )); then
        chown "$user" "$home"
        if ! (as_service "$name" test -w "$home") 2>/dev/null; then
            rmdir "$home"
            home=$(mktemp -d "/var/tmp/faregate-$name.XXXXXX")
            chown "$user" "$home"
        fi
    fi
    printf '%s\n' "$home" >"$SERVICES/$name.home"
}

# write_file NAME FILE: standard input, readable by the service alone.
write_file() {
    (as_service "$1" bash -c 'umask 077; cat >"$1"' write_file "$2")
}

record_url() {
    (umask 077; printf '%s\n' "$2" >"$SERVICES/$1.url.new")
    mv "$SERVICES/$1.url.new" "$SERVICES/$1.url"
}

new_password() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n'; }

accepts_connections() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# free_port: sets PORT. Below the range from which the system gives ports to outgoing connections, and never twice.
free_port() {
    while true; do
        PORT=$(( 20000 + RANDOM % 12000 ))
        if [[ $RESERVED_PORTS != *" $PORT "* ]] && ! accepts_connections "$PORT"; then
            RESERVED_PORTS+="$PORT "
            return
        fi
    done
}

port_of() {
    local url
    url=$(<"$SERVICES/$1.url")
    url=${url##*:}
    printf '%s\n' "${url%%/*}"
}

process_runs() { [[ -n $1 && -d /proc/$1 ]]; }

# wait_for_end PID SECONDS
wait_for_end() {
    local left=$(( $2 * 20 ))
    while process_runs "$1"; do
        (( left-- > 0 )) || return 1
        sleep 0.05
    done
}

# service_pid NAME: the process that the server itself recorded.
service_pid() {
    local home
    home=$(<"$SERVICES/$1.home")
    case $1 in
        postgres) head -n 1 "$home/data/postmaster.pid" 2>/dev/null ;;
        rabbitmq) head -n 1 "$home/pid" 2>/dev/null ;;
    esac
}

# A recorded number may by now belong to a stranger, for instance after a restart of the machine; only a process that
# carries the service's own folder or name on its command line is ours.
service_process_is_ours() {
    local pid mark
    pid=$(service_pid "$1") || return 1
    process_runs "$pid" || return 1
    mark=$(<"$SERVICES/$1.home")
    tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF -- "$mark"
}
