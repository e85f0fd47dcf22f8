# Shared by the scripts of this folder: source it, do not run it.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# The number of cores, and at most one compiler for each 1.5 GiB of memory.
jobs=$(awk -v cores="$(nproc)" '/MemAvailable/ { n = int($2 / 1572864); if (n < 1) n = 1; print (n < cores ? n : cores) }' /proc/meminfo)

# The same file compiled in two build folders is compiled once: only the folder's name in the debug information differs.
export CCACHE_NOHASHDIR=1

# Line numbers are all the debug information that a test or a demo needs; more doubles the time to compile.
build_options=(-DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g1 -DNDEBUG")

# The median of the numbers on standard input, one a line.
median() { sort -g | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }
# field NAME: that field of each JSON line on standard input.
field() { sed -n "s/.*\"$1\":\([^,}]*\).*/\1/p"; }

say() { printf '\n== %s\n' "$*"; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# need_packages GROUP...: installs what scripts/packages.txt lists for the groups and this machine lacks.
need_packages() {
  local group missing=()
  for group in "$@"; do
    local package
    while read -r package; do
      dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done < <(awk -v group="$group" '$1 == group { print $2 }' "$root/scripts/packages.txt")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "these Debian packages are missing and there is no apt-get to install them: ${missing[*]}"
  [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null || die "run as root, or install sudo or these packages first: ${missing[*]}"
  say "installing: ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { as_root apt-get update -qq &&
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    die "apt-get could not install: ${missing[*]}"
  fi
  rm -f "$log"
}
