#!/bin/sh
cd /work
cat logs/*.log | grep -c ERROR > errors.txt
find logs -name '*.log' -empty -delete
