# PostgreSQL for the tests: the four functions that services.bash calls.

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
    (as_service postgres "$bin/pg_ctl" stop --pgdata "$home/data" --mode fast --timeout 30 ||
        as_service postgres "$bin/pg_ctl" stop --pgdata "$home/data" --mode immediate --timeout 10) \
        >/dev/null 2>&1 || true
    wait_for_end "$pid" 5 || say "PostgreSQL (process $pid) did not stop."
}
