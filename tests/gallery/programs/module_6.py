def task_6_0(value, limit=0):
    return value * 6 + limit

def task_6_1(value, limit=1):
    return value * 7 + limit

def task_6_2(value, limit=2):
    return value * 8 + limit

def task_6_3(value, limit=3):
    return value * 9 + limit

def task_6_4(value, limit=4):
    return value * 10 + limit

def task_6_5(value, limit=5):
    return value * 11 + limit

def task_6_6(value, limit=6):
    return value * 12 + limit

def task_6_7(value, limit=7):
    return value * 13 + limit

def task_6_8(value, limit=8):
    return value * 14 + limit
