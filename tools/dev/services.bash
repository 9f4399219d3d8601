# The private PostgreSQL and RabbitMQ, for ./dev.
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
    : >"$SERVICES/keep"
    start_services
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
                if "find_$name" >/dev/null || "install_$name"; then jobs+=("$name"); else status=1; fi
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

# An address that is already set names a server to use instead.
service_is_wanted() {
    case $1 in
        postgres) [[ -z ${FAREGATE_TEST_POSTGRES:-} ]] ;;
        rabbitmq) [[ -z ${FAREGATE_TEST_RABBITMQ:-} || -z ${FAREGATE_TEST_RABBITMQ_STREAM:-} ]] ;;
    esac
}

service_is_up() {
    [[ -f $SERVICES/$1.url && -f $SERVICES/$1.home ]] && service_process_is_ours "$1" && accepts_connections "$(port_of "$1")"
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

# --- PostgreSQL ------------------------------------------------------------------------------------------------------

find_postgres() {
    local bin
    bin=$(printf '%s\n' /usr/lib/postgresql/*/bin | sort -V | tail -n 1)
    if [[ ! -x $bin/initdb ]]; then bin=$(dirname "$(command -v initdb)" 2>/dev/null); fi
    [[ -x $bin/initdb && -x $bin/pg_ctl ]] && printf '%s\n' "$bin"
}

install_postgres() {
    install_packages PostgreSQL postgresql || return 1
    find_postgres >/dev/null
}

# Durability stays as in production (fsync and synchronous commits are on); only the making of the empty cluster, which
# is thrown away anyway, does without.
start_postgres() {
    local home bin password
    home=$(<"$SERVICES/postgres.home")
    bin=$(find_postgres) || return 1
    password=$(new_password)
    free_port
    printf '%s\n' "$password" | write_file postgres "$home/password"
    (as_service postgres "$bin/initdb" --pgdata "$home/data" --username faregate --pwfile "$home/password" \
        --auth scram-sha-256 --encoding UTF8 --no-locale --no-sync >"$SERVICES/postgres.initdb.log" 2>&1) || return 1
    write_file postgres "$home/data/postgresql.auto.conf" <<CONF || return 1
listen_addresses = '127.0.0.1'
port = $PORT
unix_socket_directories = ''
max_connections = 200
max_prepared_transactions = 20
shared_buffers = 128MB
CONF
    (as_service postgres "$bin/pg_ctl" start --pgdata "$home/data" --log "$home/server.log" --wait --timeout 60 \
        >/dev/null 2>&1 </dev/null) || return 1
    record_url postgres "postgresql://faregate:$password@127.0.0.1:$PORT/postgres"
}

stop_postgres() {
    local home=$1 bin pid
    service_process_is_ours postgres || return 0
    pid=$(service_pid postgres)
    bin=$(find_postgres)
    # Fast: open sessions are ended, then a checkpoint. Immediate is for a server that hangs.
    (as_service postgres "$bin/pg_ctl" stop --pgdata "$home/data" --mode fast --timeout 30) >/dev/null 2>&1 ||
        (as_service postgres "$bin/pg_ctl" stop --pgdata "$home/data" --mode immediate --timeout 10) >/dev/null 2>&1 || true
    wait_for_end "$pid" 5 || say "PostgreSQL (process $pid) did not stop."
}

# --- RabbitMQ --------------------------------------------------------------------------------------------------------

# The scripts behind the distribution's wrapper, which would insist on its own user and folders.
find_rabbitmq() {
    local script
    for script in /usr/lib/rabbitmq/bin/rabbitmq-server /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server; do
        if [[ -x $script ]]; then printf '%s\n' "$script"; return; fi
    done
    return 1
}

install_rabbitmq() {
    install_packages RabbitMQ rabbitmq-server || return 1
    find_rabbitmq >/dev/null
}

start_rabbitmq() {
    local home server password amqp stream distribution epmd
    home=$(<"$SERVICES/rabbitmq.home")
    server=$(find_rabbitmq) || return 1
    password=$(new_password)
    free_port; amqp=$PORT
    free_port; stream=$PORT
    free_port; distribution=$PORT
    free_port; epmd=$PORT
    new_password | write_file rabbitmq "$home/.erlang.cookie"
    (as_service rabbitmq chmod 400 "$home/.erlang.cookie")
    printf '[rabbitmq_stream,rabbitmq_consistent_hash_exchange].\n' | write_file rabbitmq "$home/enabled_plugins"
    : | write_file rabbitmq "$home/env.conf"
    write_file rabbitmq "$home/rabbitmq.conf" <<CONF || return 1
listeners.tcp.local = 127.0.0.1:$amqp
stream.listeners.tcp.local = 127.0.0.1:$stream
stream.advertised_host = 127.0.0.1
stream.advertised_port = $stream
default_user = faregate
default_pass = $password
CONF
    # A port mapper of its own: the usual one may belong to another Erlang system, and would outlive this server.
    local -a environment=(
        PATH="$PATH" HOME="$home" LANG=C.UTF-8
        ERL_EPMD_ADDRESS=127.0.0.1 ERL_EPMD_PORT="$epmd"
        RABBITMQ_NODENAME="faregate-$amqp@localhost"
        RABBITMQ_DIST_PORT="$distribution"
        RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS='-kernel inet_dist_use_interface {127,0,0,1}'
        RABBITMQ_CONF_ENV_FILE="$home/env.conf"
        RABBITMQ_CONFIG_FILE="$home/rabbitmq.conf"
        RABBITMQ_CONFIG_FILES="$home/conf.d"
        RABBITMQ_ADVANCED_CONFIG_FILE="$home/advanced.config"
        RABBITMQ_ENABLED_PLUGINS_FILE="$home/enabled_plugins"
        RABBITMQ_MNESIA_BASE="$home/mnesia"
        RABBITMQ_LOG_BASE="$home/log"
        RABBITMQ_PID_FILE="$home/pid"
    )
    (as_service rabbitmq setsid env -i "${environment[@]}" bash -c 'echo $$ >"$HOME/epmd.pid"; exec epmd' \
        </dev/null >/dev/null 2>&1 &)
    (as_service rabbitmq setsid env -i "${environment[@]}" "$server" </dev/null >"$SERVICES/rabbitmq.console.log" 2>&1 &)
    wait_for_rabbitmq "$amqp" "$stream" || return 1
    record_url rabbitmq-stream "rabbitmq-stream://faregate:$password@127.0.0.1:$stream/"
    record_url rabbitmq "amqp://faregate:$password@127.0.0.1:$amqp/"
}

# The listeners open last, when the node is ready for clients.
wait_for_rabbitmq() {
    local deadline=$(( SECONDS + 90 )) seen=no
    until accepts_connections "$1" && accepts_connections "$2"; do
        (( SECONDS < deadline )) || return 1
        if process_runs "$(service_pid rabbitmq)"; then
            seen=yes
        elif [[ $seen == yes ]]; then
            return 1
        fi
        sleep 0.1
    done
}

stop_rabbitmq() {
    local home=$1 pid
    if service_process_is_ours rabbitmq; then
        pid=$(service_pid rabbitmq)
        # Erlang answers TERM with an orderly shutdown of every application.
        kill -TERM "$pid" 2>/dev/null || true
        if ! wait_for_end "$pid" 30; then
            kill -KILL "$pid" 2>/dev/null || true
            wait_for_end "$pid" 5 || say "RabbitMQ (process $pid) did not stop."
        fi
    fi
    pid=$(head -n 1 "$home/epmd.pid" 2>/dev/null) || return 0
    if [[ $(cat "/proc/$pid/comm" 2>/dev/null) == epmd ]]; then
        kill -TERM "$pid" 2>/dev/null || true
        wait_for_end "$pid" 5 || say "the Erlang port mapper (process $pid) did not stop."
    fi
}
