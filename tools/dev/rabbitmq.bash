# RabbitMQ for the tests: the four functions that services.bash calls.

# The scripts behind the distribution's wrapper, which would insist on its own user and folders.
find_rabbitmq() {
    local script
    if [[ -n ${FAREGATE_RABBITMQ:-} ]]; then printf '%s\n' "$FAREGATE_RABBITMQ"; return; fi
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
    printf '%s\n' "$server" >"$SERVICES/rabbitmq.server"
    # A port mapper of its own: the usual one may belong to another Erlang system, and would outlive this server.
    local -a environment=(
        PATH="${server%/*}:$PATH" HOME="$home" LANG=C.UTF-8
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
    (as_service rabbitmq setsid env -i "${environment[@]}" "$server" \
        </dev/null >"$SERVICES/rabbitmq.console.log" 2>&1 &)
    wait_for_rabbitmq "$amqp" "$stream" || return 1
    # A virtual host for each process of the tests: their queues have the same names.
    (as_service rabbitmq env -i "${environment[@]}" "${server%-server}ctl" eval '
        [begin
            rabbit_vhost:add(Name, <<"tests">>),
            rabbit_auth_backend_internal:set_permissions(<<"faregate">>, Name, <<".*">>, <<".*">>, <<".*">>, <<"tests">>)
        end || Name <- [<<"main">>, <<"gw0">>, <<"gw1">>, <<"gw2">>]].' >>"$SERVICES/rabbitmq.console.log" 2>&1) || return 1
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
