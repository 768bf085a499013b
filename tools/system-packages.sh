#!/bin/sh
# Debian packages that some tests need; with `slow` also what slow tests alone need, a Slurm. Without root or apt those
# tests are skipped, each saying what it waits for.
set -eu
missing=""
# command:package - the browser test, firewalls and ssh servers in the lab's sites, private networks, the lab itself
pairs="chromium:chromium nft:nftables sshd:openssh-server wg:wireguard-tools wireguard-go:wireguard-go ip:iproute2"
if [ "${1:-}" = slow ]; then pairs="$pairs sbatch:slurm-wlm munged:munge"; fi
for pair in $pairs; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
if [ -z "$missing" ]; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing for tests:$missing"
    apt-get update -qq
    # Nothing that is installed here may start by itself: a test starts its own ssh server, in a site of its own.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy"
    fi
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    echo "not installed:$missing; their tests will be skipped (fix: apt-get install$missing)"
fi
