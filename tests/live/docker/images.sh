#!/bin/sh
# Root file systems to import where no registry can be reached, kept as tars in a cache folder outside the repository:
#   python.tar   Debian with Python: what `debootstrap` makes of a mirror, about 90 s the first time
#   busybox.tar  one static program and its links: an image without an interpreter, 2 MB
# Usage: images.sh CACHE. Needs root and, the first time, debootstrap, busybox-static and a Debian mirror.
set -eu
cache=$1
mirror=${AGENTRL_DEBIAN_MIRROR:-http://deb.debian.org/debian}
mkdir -p "$cache"

make() { # a name and the function that fills a folder
    [ -f "$cache/$1.tar" ] && return
    root=$(mktemp -d "$cache/$1.XXXXXX")
    trap 'rm -rf "$root"' EXIT
    "$2" "$root"
    tar -C "$root" --one-file-system -cf "$root.part" .
    mv "$root.part" "$cache/$1.tar"
    rm -rf "$root"
}

fill_python() {
    debootstrap --variant=minbase --include=python3,procps,util-linux bookworm "$1" "$mirror" >&2
    rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/var/lib/apt/lists/* "$1"/usr/share/doc/* "$1"/usr/share/locale/*
}

fill_busybox() {
    mkdir -p "$1/bin" "$1/etc" "$1/tmp" "$1/root"
    cp "$(command -v busybox)" "$1/bin/busybox"
    for name in $("$1/bin/busybox" --list | grep -vx busybox); do ln -s busybox "$1/bin/$name"; done
    echo 'root:x:0:0::/root:/bin/sh' > "$1/etc/passwd"
}

make python fill_python
make busybox fill_busybox
