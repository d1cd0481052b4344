#!/bin/sh
# For mpirun what ssh is: a command on another host of the cluster.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
case $host in
    node1) exec sh -c "$*" ;;
    node2) exec nsenter -t "$(cat "$FOLDER/node2")" -n -u sh -c "$*" ;;
    *) echo "no host $host" >&2; exit 255 ;;
esac
