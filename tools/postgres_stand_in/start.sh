#!/bin/sh
# Make the database the environment asks for, unless it is there, and run the server.
set -eu
bin=$(echo /usr/lib/postgresql/*/bin)
data=/var/lib/postgresql/data
if [ ! -f "$data/PG_VERSION" ]; then
    printf %s "$POSTGRES_PASSWORD" > /tmp/password
    "$bin/initdb" --pgdata="$data" --username="$POSTGRES_USER" --pwfile=/tmp/password --auth-host=scram-sha-256 \
        --encoding=UTF8 --locale=C.UTF-8
    rm /tmp/password
    echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
    echo "create database \"$POSTGRES_DB\"" | "$bin/postgres" --single -D "$data" postgres
fi
exec "$bin/postgres" -D "$data" -c listen_addresses='*'
