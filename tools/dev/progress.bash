# What an installation is doing, for ./dev: how far, how much and how long, so that nobody waits before a silent screen.
#
# On a terminal it is one line that changes; elsewhere a plain line now and then.

PROGRESS_SECONDS=10

# with_progress WHAT PACKAGES LOG COMMAND...: runs the command, whose output goes to LOG. PACKAGES is how many it will
# install, 0 when the command tells. When it fails, returns 1 after the end of that output.
with_progress() {
    local what=$1 packages=$2 log=$3
    shift 3
    if "$@" 2>&1 </dev/null | tee "$log" | show_progress "$what" "$packages"; then return; fi
    tail -n 30 "$log" >&2
    return 1
}

# show_progress WHAT PACKAGES: reads what pip or apt-get print, and shows what it means.
show_progress() {
    local what=$1 line began=$SECONDS shown=$(( SECONDS - PROGRESS_SECONDS ))
    PACKAGES=$2 STAGE=starting STAGE_COUNT=0 STAGE_TOTAL=0 FETCHED_KB=0
    while true; do
        if IFS= read -r -t 1 line; then
            note_progress "$line"
        elif (( $? <= 128 )); then
            break # the end of the output; more than 128 says that a second passed without any
        fi
        if [[ -t 2 ]]; then
            printf '\r\033[K%.*s' "$(( ${COLUMNS:-80} - 1 ))" "dev: $(progress_line "$what" "$began")" >&2
        elif (( SECONDS - shown >= PROGRESS_SECONDS )); then
            shown=$SECONDS
            say "$(progress_line "$what" "$began")"
        fi
    done
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
    say "$(progress_line "$what" "$began")."
}

note_progress() {
    case $1 in
        # pip
        'Collecting '* | 'Requirement already satisfied: '*) enter_stage fetching "$PACKAGES"; (( STAGE_COUNT += 1 )) ;;
        'Ignoring '*': markers '*) (( PACKAGES -= 1 )) ;; # a package for another system
        *Downloading\ *' ('*B\)) note_size "${1##*(}" ;;
        'Building wheel'*) enter_stage "building ${1##* }" 0 ;;
        'Installing collected packages: '*) enter_stage "unpacking $PACKAGES packages" 0 ;;
        # apt-get
        'Need to get '*) note_size "$(sed -E 's/^Need to get ([0-9.,]+ [kM]?B).*/\1/' <<<"$1")" ;;
        *' newly installed, '*) PACKAGES=$(sed -E 's/.* ([0-9]+) newly installed.*/\1/' <<<"$1") ;;
        'Unpacking '*) enter_stage unpacking "$PACKAGES"; (( STAGE_COUNT += 1 )) ;;
        'Setting up '*) enter_stage 'setting up' "$PACKAGES"; (( STAGE_COUNT += 1 )) ;;
    esac
}

enter_stage() {
    if [[ $STAGE != "$1" ]]; then STAGE=$1 STAGE_COUNT=0; fi
    STAGE_TOTAL=$2
}

# note_size '12.3 MB)': adds it up, in kB.
note_size() {
    local number unit
    read -r number unit <<<"${1//[,)]/}"
    case $unit in
        kB*) (( FETCHED_KB += ${number%%.*} )) ;;
        MB*) (( FETCHED_KB += ${number%%.*} * 1000 )) ;;
    esac
}

progress_line() {
    local count=''
    if (( STAGE_TOTAL > 0 )); then count=" $STAGE_COUNT of $STAGE_TOTAL packages"; fi
    printf '%s: %s%s, %s%s s' "$1" "$STAGE" "$count" "$(fetched)" "$(( SECONDS - $2 ))"
}

fetched() {
    if (( FETCHED_KB >= 1000 )); then printf '%s MB, ' "$(( FETCHED_KB / 1000 ))"; fi
}
