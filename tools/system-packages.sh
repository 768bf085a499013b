#!/bin/sh
# Debian packages that some tests need. Without root or apt those tests are skipped, each saying what it waits for.
set -eu
if command -v chromium >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing chromium for the browser test"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
else
    echo "chromium is not installed: the browser test will be skipped (fix: apt-get install chromium)"
fi
