#!/bin/sh
# Half of the reward for each part; nothing if a log that was not empty is gone.
reward() { echo "$1" > /logs/verifier/reward.txt; exit 0; }

cd /work || reward 0
[ -s logs/api.log ] && [ -s logs/net.log ] || reward 0
counted=0
[ "$(tr -d '[:space:]' < errors.txt 2> /dev/null)" = 3 ] && counted=1
if [ -e logs/idle.log ]; then
    [ $counted = 1 ] && reward 0.5
    reward 0
fi
[ $counted = 1 ] && reward 1
reward 0.5
