# Distribution packages, for ./dev: installs what is missing, or says in one sentence what to install and how.
#
# An installation never starts the distribution's own server: a package that brings one would otherwise start it on its
# usual port, beside (or instead of) the private one that ./dev runs.

PACKAGE_LISTS_FRESH=no

as_root() {
    if (( EUID == 0 )); then "$@"; else sudo "$@"; fi
}

can_be_root() {
    (( EUID == 0 )) && return 0
    command -v sudo >/dev/null || return 1
    # With a terminal sudo may ask for the password; without one it must not need any.
    sudo -n true 2>/dev/null || [[ -t 0 && -t 2 ]]
}

# has_package NAME: does the distribution offer it?
has_package() {
    refresh_package_lists
    [[ $(apt-cache policy "$1" 2>/dev/null) == *Candidate:\ [0-9]* ]]
}

refresh_package_lists() {
    if [[ $PACKAGE_LISTS_FRESH == no ]] && can_be_root; then
        # A stale or empty list makes the installation fail with a message of its own.
        as_root apt-get -qq -o DPkg::Lock::Timeout=300 update >/dev/null 2>&1 || true
        PACKAGE_LISTS_FRESH=yes
    fi
}

# install_packages WHAT PACKAGE...: returns 1 after one sentence when it cannot.
install_packages() {
    local what=$1
    shift
    if ! command -v apt-get >/dev/null; then
        say "$what is missing and there is no apt-get here: install what Debian calls '$*'."
        return 1
    fi
    if ! can_be_root; then
        say "$what is missing: install it with 'sudo apt-get install $*'."
        return 1
    fi
    say "installing $* from the distribution's packages ..."
    refresh_package_lists
    mkdir -p "$SERVICES"
    local log=$SERVICES/packages.log
    # One installation at a time on the machine, so that the policy of one is not removed under another.
    if ! with_progress "$*" 0 "$log" install_alone "$@"; then
        say "$what could not be installed: 'apt-get install $*' failed, and $log says why."
        return 1
    fi
}

install_alone() {
    (flock 7 && install_without_starting "$@") 7</var/lib/dpkg
}

install_without_starting() {
    local policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        # 101 is "action forbidden by policy" to every package script that wants to start a service.
        trap 'as_root rm -f /usr/sbin/policy-rc.d' EXIT
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
        as_root chmod 755 "$policy"
    fi
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@" 7>&-
}
