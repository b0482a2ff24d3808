#!/usr/bin/env bash
# Installs a PostgreSQL server for the tests, where there is none and this may be done: Debian or Ubuntu, as root.
# Ends with 0 where there is a server, with 1 where there is none, saying why. The cluster that the package may start is
# not used: the tests start their own.
set -euo pipefail
exec < /dev/null

installed() { command -v initdb || compgen -G '/usr/lib/postgresql/*/bin/initdb'; }

refuse() {
    echo "No PostgreSQL server to test with: $1" >&2
    exit 1
}

installed > /dev/null && exit 0
command -v apt-get > /dev/null || refuse "none is installed, and there is no apt-get to install one"
[ "$(id -u)" = 0 ] || refuse "none is installed, and only root can install one (apt-get install postgresql)"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "Installing PostgreSQL for the tests"
{ apt-get update && apt-get install --yes --no-install-recommends postgresql; } > "$log" 2>&1 ||
    refuse "apt-get could not install one: $(tail -n 5 "$log")"
installed > /dev/null || refuse "apt-get installed one, but its programs are not in /usr/lib/postgresql"
