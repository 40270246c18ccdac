# Shared by the scripts in bin/: makes a fresh Debian ready. To be sourced by bash; needs nothing but bash, apt and dpkg.
#
#   sk_host        refuse a machine that cannot work
#   sk_packages    install the Debian packages named, those that are missing
#   sk_without_cluster   run a command that installs PostgreSQL, without a database server that runs afterwards
#   sk_venv        .venv in the checkout, from the hashed lock
#   sk_help        print what the calling script says of itself
#   run_as_root    run a command as root, with sudo if need be
#
# Package mirrors, proxies and certificates are those that this machine's apt and pip are configured with.

# Without byte code every start of Python compiles all that it imports: 0.6 s instead of 0.2 s for `skerry`, seconds for
# the server. Many container images forbid to write it; we do not follow them.
unset PYTHONDONTWRITEBYTECODE

SK_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SK_PYTHON=/usr/bin/python3
# What running Skerry needs of Debian.
SK_PACKAGES=(
    ca-certificates debian-archive-keyring e2fsprogs iproute2 mmdebstrap nftables python3 python3-venv
    qemu-system-x86 qemu-utils
)
# And what its tests need beside that.
SK_TEST_PACKAGES=(git postgresql procps)

sk_note() {
    printf '\033[2m· %s\033[0m\n' "$*" >&2
}

# The comment at the head of the script that was called.
sk_help() {
    sed -n '2,/^set /s/^# \{0,1\}//p' "$SK_ROOT/bin/$(basename "$0")"
}

sk_die() {
    printf 'skerry: %s\n' "$*" >&2
    exit 1
}

# Where what is built is kept; the Python code has the same rule.
sk_cache_dir() {
    if [[ -n ${SKERRY_CACHE_DIR:-} ]]; then
        printf '%s\n' "$SKERRY_CACHE_DIR"
    elif [[ $EUID -eq 0 ]]; then
        printf '/var/cache/skerry\n'
    else
        printf '%s/.cache/skerry\n' "$HOME"
    fi
}

# Run a command as root: as it is for root, by sudo for others, who keep their settings of ours and their proxies.
run_as_root() {
    local kept=() name
    if [[ $EUID -eq 0 ]]; then
        "$@"
    elif command -v sudo >/dev/null; then
        for name in $(compgen -e | grep -E '^(SKERRY_|PIP_|SSL_CERT_)|_(proxy|PROXY)$'); do
            kept+=("$name=${!name}")
        done
        sudo -- env "${kept[@]}" "$@"
    else
        sk_die "this needs root, and there is no sudo: run it as root"
    fi
}

sk_host() {
    local id="" name="an unknown system" version="" machine
    if [[ -r /etc/os-release ]]; then
        id=$(. /etc/os-release && printf '%s' "${ID:-}")
        name=$(. /etc/os-release && printf '%s' "${PRETTY_NAME:-$ID}")
        version=$(. /etc/os-release && printf '%s' "${VERSION_ID:-}")
    fi
    [[ $id == debian ]] && command -v dpkg >/dev/null || sk_die "Debian 12 or 13 is needed; this is $name"
    # Debian's testing has no VERSION_ID: it is newer than any that has one.
    [[ -z $version || ${version%%.*} -ge 12 ]] || sk_die "Debian 12 or 13 is needed; this is $name"
    machine=$(dpkg --print-architecture)
    [[ $machine == amd64 ]] || sk_die "an amd64 machine is needed; this is $machine"
}

# Print those of the packages that are not installed.
sk_missing() {
    local installed
    installed=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' "$@" 2>/dev/null | sed -n 's/^.i *//p') || true
    comm -23 <(printf '%s\n' "$@" | sort -u) <(sort -u <<<"$installed")
}

sk_packages() {
    local missing
    mapfile -t missing < <(sk_missing "$@")
    [[ ${#missing[@]} -gt 0 ]] || return 0
    sk_note "installing Debian packages: ${missing[*]}"
    # A machine whose lists are missing or too old for its mirror has to fetch them first.
    if ! apt-cache show --no-all-versions "${missing[@]}" >/dev/null 2>&1 || ! sk_apt_install "${missing[@]}"; then
        run_as_root apt-get -q update >&2 || sk_die "apt-get update failed (see above)"
        sk_apt_install "${missing[@]}" || sk_die "these packages could not be installed: ${missing[*]}"
    fi
}

sk_apt_install() {
    run_as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends "$@" >&2 </dev/null
}

# Around an installation of PostgreSQL: only its programs are wanted. Its package would make a cluster and start it, now
# and whenever the machine boots, unless its own setting says otherwise; that is put back as it is delivered.
sk_without_cluster() {
    local setting=/etc/postgresql-common/createcluster.conf delivered=/usr/share/postgresql-common/createcluster.conf
    if dpkg-query -W -f '${db:Status-Status}' postgresql-common 2>/dev/null | grep -qx installed || [[ -e $setting ]]; then
        "$@"
        return
    fi
    run_as_root mkdir -p "${setting%/*}"
    run_as_root tee "$setting" <<<"create_main_cluster = false" >/dev/null
    "$@"
    if [[ -e $delivered ]]; then
        run_as_root cp "$delivered" "$setting"
    fi
}

# Print a hash over the contents of files.
sk_hash() {
    cat -- "$@" | sha256sum | cut -c1-16
}

# Print the path of our own uv, fetched by pip with its hash checked.
sk_uv() {
    local cache place work
    cache=$(sk_cache_dir)
    place=$cache/uv-$(sk_hash "$SK_ROOT/bin/uv.lock")
    if [[ ! -x $place/uv ]]; then
        mkdir -p "$cache"
        work=$(mktemp -d "$cache/.building-uv-XXXXXX")
        sk_note "fetching uv"
        if ! { "$SK_PYTHON" -m venv "$work/venv" &&
            "$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-input --no-deps \
                --only-binary=:all: --require-hashes --target "$work/out" -r "$SK_ROOT/bin/uv.lock" &&
            mkdir "$work/place" && mv "$work/out/bin/uv" "$work/venv" "$work/place/" &&
            { mv -T "$work/place" "$place" 2>/dev/null || [[ -x $place/uv ]]; }; } >&2; then
            rm -rf "$work"
            sk_die "uv could not be fetched with pip (see above)"
        fi
        rm -rf "$work"
    fi
    printf '%s\n' "$place/uv"
}

# Tell uv, which does not read pip's configuration, what that says about indexes and certificates.
sk_uv_settings() {
    local uv=$1 name value
    # Every package is pinned by hash, so it does not matter which index it comes from.
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} UV_NO_PROGRESS=1 UV_PYTHON_DOWNLOADS=never
    export UV_CACHE_DIR=${UV_CACHE_DIR:-$(sk_cache_dir)/uv-cache} UV_LINK_MODE=${UV_LINK_MODE:-copy}
    while IFS='=' read -r name value; do
        value=${value#\'}
        value=${value%\'}
        case ${name##*.} in
        index-url) export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$value} ;;
        cert) export SSL_CERT_FILE=${SSL_CERT_FILE:-$value} ;;
        proxy) export ALL_PROXY=${ALL_PROXY:-$value} ;;
        trusted-host) export UV_INSECURE_HOST=${UV_INSECURE_HOST:-$value} ;;
        extra-index-url) export UV_INDEX=${UV_INDEX:-$(sk_existing "$value")} ;;
        find-links) export UV_FIND_LINKS=${UV_FIND_LINKS:-$(sk_existing "$value" | tr ' ' ',')} ;;
        esac
    done < <("$(dirname "$uv")/venv/bin/python" -m pip config list 2>/dev/null)
    if [[ -z ${SSL_CERT_FILE:-} && -r /etc/ssl/certs/ca-certificates.crt ]]; then
        export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
    fi
}

# Of addresses separated by spaces, print those that are not local directories which do not exist.
sk_existing() {
    local word words=()
    for word in ${1//\\n/ }; do
        case $word in
        file://*) [[ -e ${word#file://} ]] && words+=("$word") ;;
        /*) [[ -e $word ]] && words+=("$word") ;;
        *) words+=("$word") ;;
        esac
    done
    printf '%s' "${words[*]}"
}

sk_venv() {
    local key mark=$SK_ROOT/.venv/.skerry-key uv
    "$SK_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || sk_die "Python 3.11 or newer is needed"
    key=$(sk_hash "$SK_ROOT/requirements.lock" "$SK_ROOT/pyproject.toml" "$SK_ROOT/bin/lib.sh" "$(readlink -f "$SK_PYTHON")")
    [[ -r $mark && $(<"$mark") == "$key" && -x $SK_ROOT/.venv/bin/python ]] && return 0
    uv=$(sk_uv)
    mkdir -p "$SK_ROOT/.venv"
    (
        flock 9
        [[ -r $mark && $(<"$mark") == "$key" ]] && exit 0
        rm -f "$mark"
        sk_note "making the Python environment"
        sk_uv_settings "$uv"
        if [[ ! -x $SK_ROOT/.venv/bin/python ]]; then
            "$uv" venv -q --allow-existing --python "$SK_PYTHON" "$SK_ROOT/.venv" || exit 1
        fi
        export VIRTUAL_ENV=$SK_ROOT/.venv
        "$uv" pip sync -q --require-hashes "$SK_ROOT/requirements.lock" || exit 1
        "$uv" pip install -q --no-deps --no-build-isolation --editable "$SK_ROOT" || exit 1
        printf '%s\n' "$key" >"$mark"
    ) 9>"$SK_ROOT/.venv/.skerry-lock" || sk_die "the Python environment could not be made (see above)"
}
