def write_report(study, parts, out, command):
    pass
