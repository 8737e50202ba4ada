# bash completion of ckptctl: source this file, or put it into bash-completion's folder.
_ckptctl() {
    # bash splits words at "@", ":" and "=" as well; the line up to the cursor is split at blanks.
    local line=${COMP_LINE:0:COMP_POINT} word candidate
    local -a words
    read -r -a words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    word=${words[${#words[@]} - 1]}
    COMPREPLY=()
    while IFS=$'\t' read -r candidate _; do
        # What stands before the last break is there already.
        COMPREPLY+=("${candidate#"${word%"${word##*[@:=]}"}"}")
    done < <(_CKPTCTL_COMPLETE=1 "${words[0]}" "${words[@]:1}" 2>/dev/null)
}
complete -o default -o nosort -F _ckptctl ckptctl
